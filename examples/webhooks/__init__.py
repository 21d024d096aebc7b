"""Weather reports are delivered to subscribers that answer 500, 429 or 400, hang, hang up, or are away."""
