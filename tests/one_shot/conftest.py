from support.one_shot.shared_memory import shared_folder

__all__ = ["shared_folder"]
