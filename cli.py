"""Run gnnpred from a clone: python cli.py predict model.onnx --precision fp16 --gpus 8."""

from gnnpred.cli import main

if __name__ == "__main__":
    main()
