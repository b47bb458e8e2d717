"""`dovetail proxy`: prefill on some servers, decode on others."""
