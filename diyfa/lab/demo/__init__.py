"""`diyfa demo`: train one small GPT with diyfa's attention and one with PyTorch's."""
