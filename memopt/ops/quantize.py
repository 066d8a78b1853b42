__all__ = []
Quantized = quantize = dequantize = None
