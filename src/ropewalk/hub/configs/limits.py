"""How much a config may contain: limits far above every model, and so low that whatever is made of a config is small.

A config is a stranger's file. `num_hidden_layers` of 10^9 would become a list of that length, and 10^30 an overflow;
here both are errors, before anything is made of them. A number that nobody reads may be anything.
"""

__all__ = [
    "CACHED_HEADS",
    "DEEPEST",
    "LAYERS",
    "LIMITS",
    "MOST_BITS",
    "MOST_BYTES",
    "MOST_COUNT",
    "MOST_HEAD",
    "MOST_KEYS",
    "MOST_KINDS",
    "MOST_LENGTH",
    "MOST_LETTERS",
    "MOST_SECTIONS",
    "MOST_VALUES",
    "MOST_WIDTH",
]

# A file: its bytes, its values, how deep they are nested. The largest configs are lists of a hundred thousand modules.
MOST_BYTES, MOST_VALUES, DEEPEST = 16 << 20, 1 << 18, 32
# Keys of a language model, and letters of a key or of a name such as model_type.
MOST_KEYS, MOST_LETTERS = 4096, 1024
# Bits of an integer: a float holds none that is longer.
MOST_BITS = 1024
# Layers, heads, entries of a list that is read.
MOST_COUNT = 1 << 14
# Features of a head, and of a token.
MOST_HEAD, MOST_WIDTH = 1 << 12, 1 << 24
# Positions, and whatever else is a whole number: configs have the largest of 32 bits for "without a limit".
MOST_LENGTH = (1 << 31) - 1
# Kinds of layers that rotate in ways of their own, and positions per token.
MOST_KINDS, MOST_SECTIONS = 64, 16

# Names of the number of layers, and of the heads that a cache has. Lists and sizes are made of the first that is there.
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
CACHED_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_attention_heads", "n_head", "n_heads")
_COUNTS = (
    *LAYERS,
    *CACHED_HEADS,
    *("num_heads", "decoder_num_attention_heads", "speech_encoder_attention_heads"),
    *("memory_attention_num_attention_heads", "no_rope_layer_interval", "num_nextn_predict_layers"),
)
_HEADS = """
head_dim attention_head_dim kv_channels global_head_dim qk_nope_head_dim qk_rope_head_dim rotary_dim rope_dim
"""
_WIDTHS = "hidden_size n_embd d_model dim embed_dim memory_attention_hidden_size"
# The most that a number under each of these keys may be, wherever in a config it is read. For others, MOST_LENGTH.
LIMITS: dict[str, int] = {
    **dict.fromkeys(_COUNTS, MOST_COUNT),
    **dict.fromkeys(_HEADS.split(), MOST_HEAD),
    **dict.fromkeys(_WIDTHS.split(), MOST_WIDTH),
}
