"""What amphal knows of torch beyond its public interface."""
