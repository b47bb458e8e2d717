"""Draft worker `suffix`: what followed the same words before, here or in earlier answers (arXiv 2411.04975)."""
