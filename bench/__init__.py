"""What a task costs: one script a stage, each printing its figure."""
