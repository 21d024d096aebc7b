"""Each US airport becomes a task: which other airport is nearest?"""
