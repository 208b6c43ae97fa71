"""Launch, replay, compile and tune kernels."""
