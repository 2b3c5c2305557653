// Browsers do not start a Worker on a page that was opened from a folder (file://), and the search needs one. On such a
// page this class replaces it: the script runs in a hidden frame. Material's plugin for offline search looks for a file
// of this name, and would otherwise request a script of another server.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      // What the script posts arrives here, not in its own window.
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = this.inside.document.createElement("script");
      this.loaded = new Promise((resolve) => script.addEventListener("load", resolve));
      script.src = new URL(url, location.href).href;
      this.inside.document.body.append(script);
    }

    postMessage(data) {
      this.loaded.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
