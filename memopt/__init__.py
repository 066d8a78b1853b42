"""memopt: PyTorch layers that hold less memory between the forward and the backward pass."""

from importlib.metadata import PackageNotFoundError, version

from memopt import _libraries, nn
from memopt._backends import backend
from memopt.ops.quantize import Quantized, dequantize, quantize

try:
    __version__ = version("memopt")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

_libraries.load_all()

__all__ = ["Quantized", "__version__", "backend", "dequantize", "nn", "quantize"]
