"""Which steps speculate, how deep, and what one forward verifies. Knows no tensor and no clock."""
