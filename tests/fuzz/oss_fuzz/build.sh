#!/bin/bash -eu
# Builds one program for each target, with its corpus; OSS-Fuzz sets CFLAGS, OUT, SRC and LIB_FUZZING_ENGINE.
cd "$SRC/librmq"
LIBRMQ_CORE=on pip3 install . # the core has the sanitizers and the coverage that CFLAGS name
export PYTHONPATH=$PWD
for corpus in tests/fuzz/corpus/*/; do
    target=$(basename "$corpus")
    cp tests/fuzz/oss_fuzz/fuzz_target.py "$SRC/fuzz_$target.py"
    compile_python_fuzzer "$SRC/fuzz_$target.py" --collect-submodules librmq --hidden-import librmq.runtime._core
    (cd "$corpus" && zip -q -r "$OUT/fuzz_${target}_seed_corpus.zip" .)
done
