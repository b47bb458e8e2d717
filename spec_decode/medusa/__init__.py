"""Draft worker `medusa`: extra heads on the target's last hidden state (Cai et al. 2024, arXiv 2401.10774)."""
