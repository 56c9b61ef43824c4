"""What users talk to: the OpenAI API, and what turns its requests into tokens and tokens into its answers."""
