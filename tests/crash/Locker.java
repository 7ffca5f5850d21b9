import java.io.RandomAccessFile;
import java.nio.channels.FileLock;

/** Takes the lock of a store as a broker does, says whether it got it, and keeps it until its input ends. */
class Locker {
    public static void main(String[] arguments) throws Exception {
        try (RandomAccessFile file = new RandomAccessFile(arguments[0], "rw")) {
            FileLock lock = file.getChannel().tryLock(0, 1, false);
            boolean held = lock != null && lock.isValid() && !lock.isShared();
            System.out.println((held ? "locked by " : "refused to ") + ProcessHandle.current().pid());
            System.out.flush();
            System.in.read();
        }
    }
}
