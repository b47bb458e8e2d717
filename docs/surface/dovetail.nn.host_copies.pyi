import numpy as np, torch
from numpy.typing import NDArray

def on_device(array: NDArray[np.generic], device: torch.device) -> torch.Tensor: ...
