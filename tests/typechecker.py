"""What jaxtyping checks annotations with under pytest: beartype, with an int allowed where a float is asked for.

That is what type checkers allow too (PEP 484), and what Plain(base=10_000) needs.
"""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
