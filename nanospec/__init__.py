"""nanospec: a compact LLM inference engine for speculative decoding.

Reading order: `config`, `llm`, `engine`, `request`, `scheduler`, `blocks`, `state`, `runner`,
`model`, then the operations in `kernels`.
"""

from .config import EngineConfig, SpecConfig
from .llm import LLM, Completion, RequestOutput
from .sampling import SamplingParams

__all__ = ["LLM", "Completion", "EngineConfig", "RequestOutput", "SamplingParams", "SpecConfig"]
__version__ = "0.1.0"
