"""Scoring functions on a GPU: one launch for the scores of all layers, one for their gradients.

functions.py   the GPU kernels: each function and its derivatives
launches.py    how they are launched, and what autograd sees of it
"""
