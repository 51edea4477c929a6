"""Where expert workers are, and what they hold."""
