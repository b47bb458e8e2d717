"""Several engines that serve as one."""
