"""`ropewalk explore`: one HTML file that shows a RoPE in a browser. browser/ has the page, as package data."""
