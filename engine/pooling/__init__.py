"""Requests that are pooled: what they may ask for, and what they bring back."""
