"""Route `explain`: for one request, what the server would do, or did, and why."""
