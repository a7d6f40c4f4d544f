"""What a backend declares, and who has declared one."""
