"""Draft workers for Dovetail that guess from a corpus."""
