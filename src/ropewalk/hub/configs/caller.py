"""Who reads a config: the function or command that errors name, and the advice that they give to its users."""

from dataclasses import dataclass

from ropewalk.errors import shown

__all__ = ["NAMES", "Caller"]

# File names of a config in a folder, in the order in which they are tried.
NAMES = ("config.json", "params.json")


@dataclass(frozen=True)
class Caller:
    """The function that reads a config, as errors name it, and the advice that errors give to its users.

    The defaults are for a Python function. Commands use a subclass with the options of a command line.

    Attributes:
        call: The name of the function or command.
        pass_path: Advice if a path is not a config.
        pass_config: Advice if the data is not a config.
        pass_whole_config: Advice if a file omits keys that are needed.
        verb: What users do with a path: "pass" it to a function, or "specify" it to a command.
        find_pairing: Advice on the pairing of an unknown family.
        converted_weights: Advice if the pairing differs from that of a known family.

    >>> Caller("load_spec").asked("the key 'factor'"), Caller("load_spec").option("pairing", "half")
    ("load_spec: the key 'factor'", "pairing='half'")
    """

    call: str
    pass_path: str = "pass the path of a config, or its contents as a dict"
    pass_config: str = "pass the config.json of a model"
    pass_whole_config: str = "pass the config object: AutoConfig.from_pretrained(...)"
    verb: str = "pass"
    find_pairing: str = (
        'look at the code of the model: if rotate_half splits a head into two halves, pass pairing="half";'
        ' otherwise pass pairing="interleaved"'
    )
    converted_weights: str = "; for converted weights use dataclasses.replace(spec, pairing=...)"

    def asked(self, subject: str) -> str:
        """Return the call and what it reads, for the first line of an error."""
        return f"{self.call}: {subject}"

    def asked_for(self, config: object) -> str:
        """Return the call with `config` as its argument."""
        return f"{self.call}({repr(config) if isinstance(config, str) else shown(config)})"

    def asked_with(self, name: str, value: object) -> str:
        """Return the call with one option."""
        return f"{self.call}({self.option(name, value)})"

    def option(self, name: str, value: object = None) -> str:
        """Return an option with its value, or the option alone if `value` is None."""
        return f"{name}=" if value is None else f"{name}={value!r}"

    def leave_out(self, name: str) -> str:
        """Return the advice to leave an option out."""
        return f"leave {name} out"
