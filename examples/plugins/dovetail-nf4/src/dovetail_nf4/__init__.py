"""4-bit NormalFloat weights for Dovetail, as QLoRA defines them."""
