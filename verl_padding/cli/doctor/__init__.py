"""What can be known of an installation, and of a job, before Ray starts."""
