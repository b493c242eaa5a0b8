"""Property tests over the real database use the scene of the integration tests."""

from tests.integration.conftest import scene, scene_url

__all__ = ["scene", "scene_url"]
