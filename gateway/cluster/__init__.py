"""The API of Kubernetes, as far as a gateway needs it."""
