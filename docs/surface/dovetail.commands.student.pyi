__all__ = [
    "t_quantile",
]
def t_quantile(freedom: float) -> float: ...
