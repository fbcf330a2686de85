"""What users of the agent install, and how it is made."""
