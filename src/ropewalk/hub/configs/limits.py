"""Limits on the contents of a config: far above every released model, and low enough to bound memory and time.

A config is an untrusted file. `num_hidden_layers` of 10^9 would become a list of that length, and 10^30 would overflow.
Both raise an error before anything is allocated. Numbers that are never read are not limited.
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

# Of a file: bytes, values, nesting depth. The largest configs contain lists of a hundred thousand modules.
MOST_BYTES, MOST_VALUES, DEEPEST = 16 << 20, 1 << 18, 32
# Number of keys of a language model, and number of characters of a key or of a name such as model_type.
MOST_KEYS, MOST_LETTERS = 4096, 1024
# Bits of an integer. A longer one cannot be converted to a float.
MOST_BITS = 1024
# Number of layers, of heads, and of entries of a list that is read.
MOST_COUNT = 1 << 14
# Number of features per head, and per token.
MOST_HEAD, MOST_WIDTH = 1 << 12, 1 << 24
# Positions and all other integers. Some configs use the largest 32-bit integer for "unlimited".
MOST_LENGTH = (1 << 31) - 1
# Number of layer types with different rotations, and of positions per token.
MOST_KINDS, MOST_SECTIONS = 64, 16

# Keys with the number of layers, and with the number of heads in a KV cache. The first key that is set is used.
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
# The largest number accepted under each key, at any depth of a config. For other keys it is MOST_LENGTH.
LIMITS: dict[str, int] = {
    **dict.fromkeys(_COUNTS, MOST_COUNT),
    **dict.fromkeys(_HEADS.split(), MOST_HEAD),
    **dict.fromkeys(_WIDTHS.split(), MOST_WIDTH),
}
