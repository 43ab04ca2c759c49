"""Program + layout + mesh → plan: the steps of every device, and why."""
