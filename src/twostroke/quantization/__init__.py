"""Weights in fewer bits: which tensors, how, and directories that hold them."""
