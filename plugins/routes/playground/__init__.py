"""Route `playground`: a page that compares ways to speculate."""
