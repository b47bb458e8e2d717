"""New weights for a loaded model and its drafters: received, checked, then written."""
