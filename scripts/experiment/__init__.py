"""What the two experiments share: starting runs, recording them, writing reports."""
