"""Programs that use Taskline as its users would."""
