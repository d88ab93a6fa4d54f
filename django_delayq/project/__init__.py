"""What the project says: its settings, its handlers, and checks of what it passes."""
