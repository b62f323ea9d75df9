"""What people type and read: commands, pages, the dashboard. Measures nothing itself."""
