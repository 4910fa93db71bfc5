"""The only door to engines and devices. Each backend is a full member with its own name."""
