"""What people read: the stage table, the dashboard, the doctor. Measures nothing itself."""
