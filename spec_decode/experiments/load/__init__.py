"""Open-loop load in paired arms: requests arrive by rates or by a trace, the same ones in every arm."""
