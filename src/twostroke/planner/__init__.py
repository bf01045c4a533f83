"""Predicts memory, time, throughput, network, storage, energy and money for training and for serving, before any work.

Standard library only: `twostroke plan` must answer at once, and never imports torch.
"""
