"""Package glm."""
