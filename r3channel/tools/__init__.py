"""What people type and read: commands, pages, the dashboard. This package measures nothing itself."""
