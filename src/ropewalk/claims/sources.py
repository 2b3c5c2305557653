"""Sources of the claims: five notes by file name, and papers by arXiv number."""

RUSSIAN_1 = "000_ffb594141d56b26c.txt"
RUSSIAN_2 = "001_8182b44e57dbda52.txt"
CHINESE_1 = "002_05d79ddbe4245e16.txt"
KOREAN = "003_a753ee562a62d0a3.txt"
CHINESE_2 = "004_c337825752ec585b.txt"

NOTES = (RUSSIAN_1, RUSSIAN_2, CHINESE_1, KOREAN, CHINESE_2)

ROFORMER = "RoFormer, 2104.09864"
PI = "Position Interpolation, 2306.15595"
YARN = "YaRN, 2309.00071"
MEN = "Base of RoPE Bounds Context Length, 2405.14591"
LIU = "Scaling Laws of RoPE-based Extrapolation, 2310.05209"
BARBERO = "Round and Round We Go, 2410.06205"
NOPE = "The Impact of Positional Encoding on Length Generalization, 2305.19466"
LLAMA_2 = "Llama 2, 2307.09288"
FOLKLORE = "common practice"
XPOS = "A Length-Extrapolatable Transformer, 2212.10554"
T5 = "T5, 1910.10683"
LINEAR = "Transformers are RNNs, 2006.16236"
