"""`diyfa demo`: a small GPT trained with diyfa's attention beside PyTorch's."""
