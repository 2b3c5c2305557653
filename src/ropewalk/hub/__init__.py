"""What models in the WILD do: their configs, read into specs."""

from ropewalk.hub.config import load_spec as load_spec
from ropewalk.hub.pitfalls import RopeConfigWarning as RopeConfigWarning

__all__ = ["RopeConfigWarning", "load_spec"]
