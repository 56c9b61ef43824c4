"""Tensor operators. They know shapes, not requests."""
