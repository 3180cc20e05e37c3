# Sourced by the scripts of this folder. fetch FOLDER REQUIREMENT...: downloads wheels for Python 3.12 on x86-64 Linux.
platforms=()
for version in 2_39 2_35 2_34 2_31 2_28 2_27 2_26 2_24 2_18 2_17 2_12 2_5; do
    platforms+=(--platform "manylinux_${version}_x86_64")
done
for year in 2014 2010 1; do
    platforms+=(--platform "manylinux${year}_x86_64")
done
fetch() {
    python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp "${platforms[@]}" -d "$@"
}
